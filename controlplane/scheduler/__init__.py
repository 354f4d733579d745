"""The room desk: who serves a request, and every room from open to ended."""
