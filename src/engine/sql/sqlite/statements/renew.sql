-- Extends every lease of a claim to at least $3 from now, if the claim holds all of them.
-- Changes as many rows as there are names, or none.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner   $3 ttl
WITH clock (now) AS MATERIALIZED (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER))
UPDATE "{table}" SET expires_at = max(expires_at, (SELECT now FROM clock) + $3)
WHERE owner = $2
  AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed)
  AND (SELECT count(*)
        FROM json_each($1) AS claimed
        JOIN "{table}" AS held ON held.name = unhex(claimed.value)
        WHERE held.owner = $2 AND held.expires_at > (SELECT now FROM clock)) = json_array_length($1);
