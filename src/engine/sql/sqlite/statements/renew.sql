-- Extends every lease of a claim to at least $3 from now, and makes $4 its owner, if $2 holds all of them. A lease that $4 holds
-- already counts, too: a retry of a transfer after a lost reply.
-- Changes as many rows as there are names, or none.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner   $3 ttl   $4 new owner   $5 host   $6 pid
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
UPDATE "{table}" SET expires_at = max(expires_at, (SELECT now FROM clock) + $3),
  owner = $4, host = $5, pid = $6
WHERE owner IN ($2, $4)
  AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed)
  AND (SELECT count(*)
        FROM json_each($1) AS claimed
        JOIN "{table}" AS held ON held.name = unhex(claimed.value)
        WHERE held.owner IN ($2, $4) AND held.expires_at > (SELECT now FROM clock)) = json_array_length($1);
