// Scores of search results. Guides come before the reference, and generated pages last.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (docname.startsWith("how-to/") ? 4 : docname.startsWith("explanation/performance") ? -3
      : docname === "reference/commands" || docname === "reference/python-api" ? -2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
