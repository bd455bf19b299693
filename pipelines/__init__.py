"""Scripts to adapt: make stores, fit them and encode them, from a laptop to a cluster."""
