"""What a launch will take, alone and beside others."""
