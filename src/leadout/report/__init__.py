"""What a page without a network is made of: its style and its charts."""
