"""The rows of the benchmark: each measures one promise against its peer or limit, in the same run."""
