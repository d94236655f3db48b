"""Tests over HTTP; as a package, so that the system of `conftest` ends with the last of them."""
