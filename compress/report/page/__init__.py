"""Pages in HTML: typed blocks of content, a template for each kind of block, and one style sheet."""
