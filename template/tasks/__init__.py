"""Yours: one folder per task. Updates of the template never touch what is here."""
