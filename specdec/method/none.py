"""No speculation: the baseline that every speedup is measured against, in the same engine."""

from __future__ import annotations

import numpy as np

from specdec.core import Context, Draft, MethodFacts, StatelessProposer, draft_from_lists


class Plain(StatelessProposer):
    """Drafts nothing."""

    facts = MethodFacts(drafts=False)

    def propose(self, context: Context) -> Draft:
        return draft_from_lists([np.zeros(0, dtype=np.int64)] * len(context.rows), context.last_token_B.device)
