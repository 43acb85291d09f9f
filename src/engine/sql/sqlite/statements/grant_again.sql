-- Extends every lease of a claim to at least $3. The transaction has read that the claim holds all of its names.
--
-- $1 names: JSON array of hexadecimal texts   $2 owner   $3 the new end
UPDATE "{table}" SET expires_at = max(expires_at, $3)
WHERE owner = $2 AND name IN (SELECT unhex(claimed.value) FROM json_each($1) AS claimed);
