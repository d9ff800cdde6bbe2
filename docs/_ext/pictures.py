"""Show the variant of a picture that suits the theme, and link pictures to their full size.

A picture is written in plain Markdown. If there is a file dark/NAME-dark.png beside NAME.png, the
dark theme shows that one; GitHub shows NAME.png.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class PictureVariants(SphinxTransform):
    """Wrap each picture in a link, and add its dark variant."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            path = Path(image["uri"])
            if isinstance(image.parent, nodes.reference) or not (folder / path).is_file():
                continue
            dark = path.parent / "dark" / f"{path.stem}-dark{path.suffix}"
            variants = [(str(path), [])]
            if (folder / dark).is_file():
                variants = [(str(path), ["only-light"]), (str(dark), ["only-dark"])]
            links = []
            for uri, classes in variants:
                shown = image.deepcopy()
                shown["uri"] = uri
                link = nodes.reference("", "", shown, classes=["picture", *classes], refuri="")
                links.append(link)
            image.replace_self(links)


def link_to_full_size(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Set the targets of the links, which are known when Sphinx has collected all pictures."""
    for link in doctree.findall(nodes.reference):
        if "picture" in link["classes"]:
            image = next(iter(link.findall(nodes.image)))
            file = app.env.images[image["uri"]][1]
            link["refuri"] = f"{'../' * name.count('/')}_images/{file}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(PictureVariants)
    app.connect("doctree-resolved", link_to_full_size)
    return {"parallel_read_safe": True}
