-- The name behind the rows that a page of a list may read.
--
-- $1 the first name   $2 the first name after the range, NULL: there is none   $3 maximum number of rows
-- → name, no row: the range has fewer rows
SELECT name
FROM "{table}"
WHERE name >= $1 AND ($2 IS NULL OR name < $2)
ORDER BY name
LIMIT 1 OFFSET $3;
