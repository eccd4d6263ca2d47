"""What clients may send: the bodies of requests, validated strictly. Pure; knows no other room."""
