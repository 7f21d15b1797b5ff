"""What any run is: its directory, log, checkpoints, process and policy. Knows neither rl nor imitation nor data."""
