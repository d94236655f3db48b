"""Keeps blobs, chunks and manifests under their hashes, in a folder or in S3."""
