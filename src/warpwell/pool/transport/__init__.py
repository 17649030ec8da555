"""Messages and bulk data between the processes of a pool."""
