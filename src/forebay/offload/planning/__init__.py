"""Planning without a device: traces, plans, replays, and what hardware would do. numpy alone."""
