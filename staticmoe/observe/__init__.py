"""Records, results, metrics and sinks: what a run tells about itself."""
