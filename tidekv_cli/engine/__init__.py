"""The prefill and decode engine. Knows no command line, no profile, no report."""
