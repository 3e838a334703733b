"""One request over several processes: real process groups over gloo, on the CPU."""
