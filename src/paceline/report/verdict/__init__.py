"""The three sentences that every report begins with: verdict, why, next."""
