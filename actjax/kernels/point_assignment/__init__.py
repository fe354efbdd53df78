"""To each token, the point it resembles most."""
