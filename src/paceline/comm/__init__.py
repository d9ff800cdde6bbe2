"""Communication between ranks: rendezvous, network interfaces, and the backend "paceline"."""
