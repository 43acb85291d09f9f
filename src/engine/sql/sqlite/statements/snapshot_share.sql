-- Reads the state of a shared name for a claim of a share, as snapshot.sql does.
--
-- $1 name   $2 owner   $3 the name of its share   $4 the first name of a share   $5 the name after the last one
-- → now, last fence, held by $2 (NULL: no), lease's end, lease's fence, ends of the first and of the last live position ahead,
-- permits in use by others, the smallest limit of these, the next end of one,
-- port, number, permits and their limit of the first live waiter of another owner
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
ahead (ticket, alive_until) AS MATERIALIZED (
  SELECT ticket, alive_until
  FROM "{table}_waiters", clock
  WHERE name = $1 AND alive_until > clock.now AND owner <> $2
    AND ticket < coalesce((SELECT ticket FROM "{table}_waiters" WHERE owner = $2), 9223372036854775807)
),
others (used, least, next_end) AS MATERIALIZED (
  SELECT coalesce(sum(permits), 0), min(permit_limit), min(expires_at)
  FROM "{table}", clock
  WHERE name >= $4 AND name < $5 AND expires_at > clock.now AND name <> $3
)
SELECT
  clock.now,
  fence.last,
  held.owner = $2,
  held.expires_at,
  held.fence,
  (SELECT alive_until FROM ahead ORDER BY ticket LIMIT 1),
  (SELECT alive_until FROM ahead ORDER BY ticket DESC LIMIT 1),
  others.used,
  others.least,
  others.next_end,
  next.wake_port,
  next.wake_id,
  next.permits,
  next.permit_limit
FROM clock
CROSS JOIN others
CROSS JOIN "{table}_fence" AS fence
LEFT JOIN "{table}" AS held ON held.name = $3 AND held.expires_at > clock.now
LEFT JOIN "{table}_waiters" AS next ON next.ticket =
  (SELECT ticket FROM "{table}_waiters" WHERE name = $1 AND alive_until > clock.now AND owner <> $2 ORDER BY ticket LIMIT 1);
