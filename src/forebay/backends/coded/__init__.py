"""The backend of a bucket whose objects are erasure-coded over the cluster's nodes."""
