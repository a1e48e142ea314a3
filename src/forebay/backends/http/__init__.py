"""What all cloud backends share: requests, bodies, tokens."""
