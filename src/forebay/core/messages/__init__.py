"""What processes say to each other: front and engine, client and front. Values and their frames."""
