"""What tests of other packages may use too: conformance suites and fault injection."""
