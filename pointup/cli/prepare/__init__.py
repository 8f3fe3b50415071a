"""`pointup prepare`: makes pair datasets."""
