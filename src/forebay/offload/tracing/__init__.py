"""Makes traces from running steps, and from models of sizes that fit no machine here."""
