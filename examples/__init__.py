"""Small programs: other people's models, trained with actjax."""
