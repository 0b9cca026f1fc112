"""Measurements that go beyond `paged-prefill bench`; run from the tree's root, against the installed wheel."""
