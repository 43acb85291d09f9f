-- Removes the key of the last fencing token of all names (LAST in src/engine/redis/keys/mod.rs) from KEYS, if it is the last of
-- them. Placed first in every script that draws a token. A cluster has no such key: it would be in another slot, or block the
-- keys of a name while their slot moves, so each name's fence companion outlives the lease instead.

local LAST = KEYS[#KEYS] == 'holdfast:last' and table.remove(KEYS) or nil

