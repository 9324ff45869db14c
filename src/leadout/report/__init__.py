"""Reports that open without a network: HTML pages and SVG charts."""
