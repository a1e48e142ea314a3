"""Archives, their members, and manifests, as bytes."""
