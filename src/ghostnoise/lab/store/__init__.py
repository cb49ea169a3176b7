"""Run folders and files of records: crash-safe storage, which is read as untrusted data."""
