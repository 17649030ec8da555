"""Programs that tests of tables run in processes of their own, for some are expected to be killed."""
