"""`pointup report`: one HTML file about one or several runs."""
