// Scores of search results. Guides come before the reference, and generated pages last. Sphinx orders
// equal scores by title: FIRST are the pages that most readers look for.
const FIRST = ["how-to/run/first-cluster-job", "how-to/improve/slow-job", "how-to/improve/pack-and-stage"];
const LAST = ["reference/commands", "reference/python-api", "explanation/performance"];

var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score +
    (docname.startsWith("how-to/") ? 4 : 0) +
    (FIRST.includes(docname) ? 1 : 0) -
    (LAST.includes(docname) ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
