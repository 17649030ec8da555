"""Models of concurrent parts for `interleavings`, one module each; `faults_planted` lists the planted faults."""
