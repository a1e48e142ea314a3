"""From a running step to a trace: operators, storages, times, and models of sizes that fit no machine here."""
