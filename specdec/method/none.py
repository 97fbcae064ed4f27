"""No speculation: the baseline that every speedup is measured against, in the same engine."""

from __future__ import annotations

from specdec.core import Context, Draft, MethodFacts, StatelessProposer


class Plain(StatelessProposer):
    """Drafts nothing."""

    name = "none"
    facts = MethodFacts(drafts=False)

    def propose(self, context: Context) -> Draft:
        return Draft.empty(len(context.rows), context.last_token_B.device)
