"""Archives, their members, and listings, as bytes."""
