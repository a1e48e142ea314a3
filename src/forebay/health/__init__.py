"""What `forebay doctor` looks at, and what it makes of it."""
