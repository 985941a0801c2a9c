"""`sixstage bench peers`: the stages beside other engines that serve the same model on the same machine."""
