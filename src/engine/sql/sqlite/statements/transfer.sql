-- Makes $3 the owner of every lease of a claim, and extends each to at least $4 from now, if $2 holds all of them. A lease that
-- $3 holds already counts, too: a retry after a lost reply.
-- Changes as many rows as there are names, or none.
--
-- $1 names: JSON array of hexadecimal texts   $2 old owner   $3 new owner   $4 ttl   $5 host   $6 pid
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
UPDATE "{table}" SET owner = $3, expires_at = max(expires_at, (SELECT now FROM clock) + $4), host = $5, pid = $6
WHERE owner IN ($2, $3)
  AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed)
  AND (SELECT count(*)
        FROM json_each($1) AS claimed
        JOIN "{table}" AS held ON held.name = unhex(claimed.value)
        WHERE held.owner IN ($2, $3) AND held.expires_at > (SELECT now FROM clock)) = json_array_length($1);
