"""Serving engines, each in its own environment: started as a child process, asked, stopped. No torch in here."""
