"""Where memory is short: answers repaired, crossed over, under reduced limits; the least memory."""
