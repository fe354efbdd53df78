"""Settings of the programs: flags, methods, codecs, and defaults filled in."""
