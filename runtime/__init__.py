"""Static-graph training of speculative drafters over prebuilt masks."""
