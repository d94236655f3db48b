"""Takes in what tenants bring: datablocks, bundles of code, and graphs."""
