-- Function for --@include; no script by itself. Reads neither KEYS nor ARGV.
--
-- Returns the parts of a batch from its field `parts`, or nil: it has none. {} when they cannot be read: whoever can
-- write to Redis may have put that there. The part of a chunk is parts[number % #parts + 1].
local function parts_of(text)
  if not text or text == '' then
    return nil
  end
  local ok, parts = pcall(cjson.decode, text)
  if not ok or type(parts) ~= 'table' then
    return {}
  end
  for _, part in ipairs(parts) do
    if type(part) ~= 'table' or type(part.model) ~= 'string' or type(part.cursor) ~= 'number'
      or type(part.next_chunk) ~= 'number' or type(part.outstanding) ~= 'number' or type(part.ended) ~= 'number'
      or type(part.at_end) ~= 'boolean' then
      return {}
    end
  end
  return parts
end
