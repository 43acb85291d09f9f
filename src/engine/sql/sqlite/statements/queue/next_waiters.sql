-- Reads which waiters of an engine are the first in the queue of a free name, or of a shared one where they fit.
--
-- $1 JSON array of the owners of its waiters
-- → number of the waiter
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
SELECT position.wake_id
FROM json_each($1) AS claimed
CROSS JOIN clock
CROSS JOIN "{table}_waiters" AS position ON position.owner = claimed.value
WHERE position.alive_until > clock.now
  AND position.wake_id IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM "{table}" AS held
      WHERE held.name = position.name AND held.expires_at > clock.now AND held.owner <> position.owner || '-next')
  AND (position.permits IS NULL OR (
    SELECT coalesce(sum(share.permits), 0) + position.permits <= min(position.permit_limit, coalesce(min(share.permit_limit), position.permit_limit))
    FROM "{table}" AS share
    WHERE share.name > unhex(hex(position.name) || 'FF') AND share.name < unhex(hex(position.name) || 'FF67') AND share.expires_at > clock.now))
  AND NOT EXISTS (SELECT 1 FROM "{table}_waiters" AS ahead
      WHERE ahead.name = position.name AND ahead.ticket < position.ticket AND ahead.alive_until > clock.now);
